"""A small checkpoint, and what can be done to its files."""

import copy
import functools
import hashlib
import json
import operator

import numpy as np

import eqx_ensemble as ee

MANIFEST = "checkpoint.json"


def small():
    """A tree with members, whose checkpoint is below 4 KiB."""
    return {"e": ee.Each(np.arange(6, dtype=np.int16).reshape(3, 2)), "s": np.array([1.5]), "n": 3}


def arrays_file(path):
    (file,) = path.glob("*.safetensors")
    return file


def load(path):
    return ee.load(path, small())


def flip(file, data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)


def every_bit(path, step, start=0):
    """Flips single bits in both files; returns a list of the flips that were not detected."""
    silent, count = [], 0
    for file in list(path.iterdir()):
        data = file.read_bytes()
        for bit in range(start, 8 * len(data), step):
            flip(file, data, bit)
            count += 1
            try:
                load(path)
                named = None
            except ee.CheckpointCorruptError as error:
                named = error.file
            if named != str(file):
                silent.append((file.name, bit))
        file.write_bytes(data)
    load(path)
    return silent, count


def every_length(path, step, start=0):
    """Truncates and extends both files; returns a list of the changes that were not detected."""
    silent, count = [], 0
    for file in list(path.iterdir()):
        data = file.read_bytes()
        lengths = [data[:length] for length in range(start, len(data), step)]
        for changed in (*lengths, *(data + more for more in (b"\0", b" ", b"\n", data))):
            file.write_bytes(changed)
            count += 1
            try:
                load(path)
                named = None
            except ee.CheckpointCorruptError as error:
                named = error.file
            if named != str(file):
                silent.append((file.name, len(changed)))
        file.write_bytes(data)
    load(path)
    return silent, count


def forge(path, change):
    """Writes a manifest with some changes and a correct checksum."""
    file = path / MANIFEST
    content = json.loads(file.read_text())["manifest"]
    changed = change(content)
    content = content if changed is None else changed
    write_manifest(path, content if isinstance(content, bytes) else json.dumps(content).encode())


def write_manifest(path, body):
    seal = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n"manifest": '
    (path / MANIFEST).write_bytes(seal + body + b"}\n")


def entry(**fields):
    return lambda content: content["entries"][0].update(fields)


def first_number(**fields):
    return lambda content: content["numbers"][0].update(fields)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


REPLACEMENTS = [None, True, -1, 3, 10**30, -0.5, 1e300, "", "x", [], [1], {}, {"": 1}, {"": ["tensor", 1]}]
REPLACEMENTS += [{"": ["array", {"dtype": "float32", "shape": [10**12], "base64": ""}]}, nested(90), nested(300)]


def places_of(value, path=()):
    """The paths of all values in JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places_of(item, (*path, key))


def mutated(content, path, replacement):
    """JSON with another value at a path, or without it for `...`."""
    content = copy.deepcopy(content)
    *outer, last = path
    target = functools.reduce(operator.getitem, outer, content)
    if replacement is ...:
        del target[last]
    else:
        target[last] = replacement
    return content


def forge_each(path, draw, count, under=()):
    """Forges the manifest of a checkpoint in many ways, one after another; yields what is changed."""
    before = (path / MANIFEST).read_bytes()
    content = json.loads(before)["manifest"]
    inner = functools.reduce(operator.getitem, under, content)
    choices = [((*under, *place), value) for place in places_of(inner) if place for value in (..., *REPLACEMENTS)]
    for place, value in draw.sample(choices, min(count, len(choices))):
        write_manifest(path, json.dumps(mutated(content, place, value)).encode())
        yield place, value
    (path / MANIFEST).write_bytes(before)


DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "a path out of the folder": lambda c: c.update(file="../arrays-0001.safetensors"),
    "an absolute path": lambda c: c.update(file="/etc/passwd"),
    "a folder as file": lambda c: c.update(file="."),
    "a zero byte in the name": lambda c: c.update(file="arrays-0001\0.safetensors"),
    "a number that is no ASCII": lambda c: c.update(file="arrays-٣.safetensors"),
    "the file as a list": lambda c: c.update(file=["arrays-0001.safetensors"]),
    "a missing file": lambda c: c.update(file="arrays-0002.safetensors"),
    "negative sizes": entry(shape=[-3, -2]),
    "NaN sizes": entry(shape=[float("nan"), 2]),
    "infinite sizes": entry(shape=[float("inf"), 2]),
    "sizes with a fraction": entry(shape=[3.0, 2]),
    "booleans as sizes": entry(shape=[True, 2]),
    "a huge size": entry(shape=[3, 10**30]),
    "a size of a petabyte": entry(shape=[3, 10**15]),
    "a product that wraps around": entry(shape=[3, 2**32, 2**32]),
    "a huge size next to zero": entry(shape=[3, 2**62, 0]),
    "a thousand axes": entry(shape=[3] + [1] * 1000),
    "other sizes": entry(shape=[3, 3]),
    "an unknown dtype": entry(dtype="object"),
    "a dtype with fields": entry(dtype="i4,i4"),
    "another dtype": entry(dtype="float16"),
    "an unknown kind": entry(kind="other"),
    "another kind": entry(kind="shared"),
    "keys of an unknown generator": entry(key="os.system"),
    "keys of the wrong dtype": entry(key="threefry2x32"),
    "a checksum of the wrong type": entry(checksum=1),
    "another checksum": entry(checksum="0" * 64),
    "a tensor that is not there": entry(tensor="other"),
    "a leaf twice": lambda c: c["entries"].append(c["entries"][0]),
    "the name of the checksums": entry(path="<checksums>", tensor="<checksums>"),
    "an unknown field of a leaf": entry(offset=0),
    "a missing field of a leaf": lambda c: c["entries"][0].pop("shape"),
    "a leaf that is no object": lambda c: c["entries"].append(1),
    "no leaves": lambda c: c.update(entries=None),
    "many leaves that are not there": lambda c: c.update(
        entries=[c["entries"][1] | {"path": str(i)} for i in range(10**3)]
    ),
    "members out of range": lambda c: c.update(members=[0, 1, 2**31]),
    "members twice": lambda c: c.update(members=[0, 1, 1]),
    "more members": lambda c: c.update(members=[0, 1, 2, 3]),
    "no members": lambda c: c.update(members=None),
    "an unknown field": lambda c: c.update(more=1),
    "a missing field": lambda c: c.pop("meta"),
    "no format": lambda c: c.pop("format"),
    "a step that is no integer": lambda c: c.update(step="1"),
    "a score that is no number": lambda c: c.update(score=[1]),
    "structure of numbers": lambda c: c.update(structure={"a": 1}),
    "a number of an unknown type": first_number(type="eval"),
    "a number with code": first_number(value="__import__('os')"),
    "a number too large": first_number(type="float", value="0x1p99999"),
    "a list": lambda c: [c],
    "a text": lambda c: b'"text"',
    "nothing": lambda c: b"",
    "no JSON": lambda c: b"{",
    "no UTF-8": lambda c: b'{"format": "\xff\xfe"}',
    "deep JSON": lambda c: DEEP,
    "deep objects": lambda c: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a key twice": lambda c: b'{"format": 1, "format": 2}',
    "an integer of a million digits": lambda c: b'{"format": ' + b"9" * 10**6 + b"}",
    "UTF-16": lambda c: json.dumps(c).encode("utf-16"),
}


HEADERS = {
    "a huge header": lambda data: (2**62).to_bytes(8, "little") + data[8:],
    "a header without an end": lambda data: (2**64 - 1).to_bytes(8, "little") + data[8:],
    "an empty header": lambda data: bytes(8) + data[8:],
    "overlapping offsets": lambda data: data.replace(b'"data_offsets":[0,8]', b'"data_offsets":[4,8]'),
    "another order": lambda data: data.replace(b'"dtype":"F64"', b'"dtype":"I64"'),
    "deep JSON": lambda data: data[:8] + DEEP[: len(data) - 8].ljust(len(data) - 8),
}
