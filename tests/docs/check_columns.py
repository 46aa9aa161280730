"""Holds C++ and CUDA sources, comments as code, to the columns of .clang-format: `check_columns.py ROOT`."""

import pathlib
import re
import sys


def main(root):
    limit = int(re.search(r"^ColumnLimit: (\d+)$", (root / ".clang-format").read_text(), re.M)[1])
    files = [path for folder in ("include", "tests", "examples", "bench")
             for path in sorted((root / folder).rglob("*")) if path.suffix in (".hpp", ".cuh", ".cpp", ".cu", ".h", ".c")]
    errors = [f"{path.relative_to(root)}:{number} has {len(line)} columns, and .clang-format says {limit}"
              for path in files for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > limit]
    print("\n".join(errors) or f"{len(files)} files: no line above {limit} columns")
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
