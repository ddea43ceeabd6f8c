"""`python -m benchmarks [--quick] [NAME ...]`: runs scripts in processes of their own and prints one table."""

import json
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # the scripts are run, not imported, and share their modules as neighbours

from _measure import Row, environment_lines, flags, rows_table  # noqa: E402

SCRIPTS = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
LONG = {"acquisition", "estimators", "rankings"}  # a quarter of an hour and more each: run when named
USUAL = [name for name in SCRIPTS if name not in LONG]


def main() -> int:
    parser = flags()
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(SCRIPTS)}; without, all but {LONG}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    rows, seconds, failed = [], {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or USUAL:
            path = pathlib.Path(folder, f"{name}.json")
            command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
            command += ["--quick"] * options.quick + ["--save"] * options.save
            command += [] if options.cores is None else ["--cores", str(options.cores)]
            if subprocess.run(command).returncode:
                failed.append(name)
                continue
            found = json.loads(path.read_text())
            rows += [Row(**{k: v for k, v in row.items() if k != "verdict"}) for row in found["results"]["rows"]]
            seconds[name] = found["environment"]["seconds"]
    if rows:
        environment = found["environment"] | {"seconds": sum(seconds.values()), "cores": "1 or all"}
        print(f"\nAll questions\n=============\n{environment_lines(environment)}")
        print(", ".join(f"{name} {taken} s" for name, taken in seconds.items()))
        print(f"\n{rows_table(rows)}")
    for name in failed:
        print(f"\n`benchmarks/{name}.py` failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
