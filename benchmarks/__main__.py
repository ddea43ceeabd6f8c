"""`python -m benchmarks [--quick] [NAME ...]`: runs scripts in processes of their own and prints one table.

`reliability` kills processes and fills disks, and runs only when it is named.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # the scripts are run, not imported, and share their modules as neighbours

from _measure import Row, environment_lines, flags, rows_table, saved  # noqa: E402

SCRIPTS = (
    "training",
    "cores",
    "optax_stacked",
    "stopping",
    "populations",
    "prediction",
    "uncertainty",
    "estimators",
    "scaling",
    "vmap_or_loop",
    "imports",
    "building",
    "first_call",
    "steps",
    "choosing",
    "acquisition",
    "quality",
    "methods",
    "efficient",
    "adapters",
    "house",
)
KNOWN = (*SCRIPTS, "reliability")


def main() -> int:
    parser = flags()
    text = f"some of {', '.join(KNOWN)}; all but `reliability` if not given"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    options = parser.parse_args()
    if unknown := set(options.names) - set(KNOWN):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or SCRIPTS:
            path = pathlib.Path(folder, f"{name}.json")
            command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
            command += ["--quick"] * options.quick
            command += [] if options.cores is None else ["--cores", str(options.cores)]
            done = subprocess.run(command)
            if done.returncode:
                failed.append(name)
                continue
            found = json.loads(path.read_text())
            results.append(found["results"])
            environment = found["environment"]
    if results:
        rows = [Row(**{k: v for k, v in row.items() if k != "verdict"}) for result in results for row in result["rows"]]
        print(f"\nAll questions\n=============\n{environment_lines(environment)}\n\n{rows_table(rows)}")
        if options.save:
            print(f"\nsaved to {saved('all', results, environment)}")
    for name in failed:
        print(f"\n`benchmarks/{name}.py` failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
