"""Counts the names of namespace freekv, so that they stay few: what no user writes belongs to freekv::detail.
`check_names.py ROOT`."""

import pathlib
import re
import sys

UNNAMED = 133  # names of freekv that neither a page nor an example has; fewer is better

TYPE = r"(?:template <.*> ?)?(?:struct|class|enum class|enum|concept|using) (\w+)"
CONSTANT = r"(?:inline |static )*constexpr [\w:<>*, ]+? (\w+)(?: =|\{)"
FUNCTION = r"(?:\[\[.*?\]\] ?)?(?:FREEKV_HD |inline |constexpr |static |auto )*[\w:<>*&, ]+? [*&]?(\w+)\("
NO_NAMES = {"requires", "static_assert", "if", "defined", "operator"}


def names_of(header):
    """Names declared in namespace freekv itself, as clang-format lays them out."""
    inside = []
    for line in header.read_text().splitlines():
        if opened := re.match(r"namespace ([\w:]*) ?\{", line):
            inside.append(opened[1])
        elif line.startswith("}  // namespace") and inside:
            inside.pop()
        elif inside == ["freekv"] and not line.startswith((" ", "//")) and "return" not in line:
            if found := re.match(TYPE, line) or re.match(CONSTANT, line) or re.match(FUNCTION, line):
                yield found[1]


def main(root):
    pages = [*root.glob("docs/*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    examples = [path for path in root.glob("examples/*") if path.suffix in (".cpp", ".cu", ".c")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in pages + examples)))
    headers = [path for path in (root / "include/freekv").rglob("*") if path.suffix in (".hpp", ".cuh")]
    names = {name for header in headers for name in names_of(header)} - NO_NAMES
    unnamed = sorted(names - words)
    if len(unnamed) > UNNAMED:
        print(f"{len(unnamed)} names of namespace freekv are in no page and no example, and {UNNAMED} were: put what users "
              f"do not name into freekv::detail. They are {', '.join(unnamed)}")
        return 1
    print(f"{len(names)} names in namespace freekv, {len(unnamed)} of them in no page and no example")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
