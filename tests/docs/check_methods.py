"""Holds what lists or names methods outside methods.hpp to it, by the table of docs/policies.md, which another test holds to it:
`check_methods.py ROOT`."""

import ast
import pathlib
import re
import sys


def constants_of(path):
    """What a Python file assigns, at its top level, of literals alone."""
    values = {}
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                values[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:
                pass
    return values


def main(root):
    page = (root / "docs/policies.md").read_text()
    methods = re.findall(r"^\| `(\w+)` \|", page[page.index("| method | as policies |"):], re.M)
    evaluated = constants_of(root / "examples/eval/evaluate.py")["METHODS"]
    plots = constants_of(root / "examples/eval/plot.py")
    variants = (root / "examples/support/variants.cpp").read_text()
    shown = re.findall(r'"(\w+)"', re.search(r"shown_by_default\[\] = \{([^}]*)\}", variants)[1])
    readme = re.findall(r"^\| `(\w+)`:|`(freekv_\w+)`", (root / "README.md").read_text(), re.M)
    errors = []
    for where, names in (("evaluate.py's METHODS", evaluated), ("plot.py's COLOURS", plots["COLOURS"]),
                         ("variants.cpp's shown_by_default", shown), ("README.md", map("".join, readme)),
                         ("plot.py's LABELS", (name.split(",")[0] for name in plots["LABELS"]))):
        errors += [f"{where} has {name}, which is no method" for name in names if name not in methods]
    errors += [f"{name} has no colour in plot.py, and begins with none that has" for name in methods
               if not any(name.startswith(coloured) for coloured in plots["COLOURS"])]
    compared = re.search(r"#define METHODS (.*)", (root / "examples/compare_methods.cpp").read_text())[1]
    timed = re.search(r"foreach\(method (.*)\)", (root / "examples/compare_methods.cmake").read_text())[1]
    if re.sub(r"\W+", " ", compared).split() != timed.split():
        errors.append(f"compare_methods.cpp compares {compared}, and compare_methods.cmake times {timed}")
    print("\n".join(errors) or f"{len(methods)} methods: README.md and lists in examples/ name no others")
    return 1 if errors or not methods else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
