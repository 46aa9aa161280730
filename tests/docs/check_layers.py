"""Holds the headers' includes to docs/architecture.md: `check_layers.py ROOT`.

The page has a table of the folders that each folder may include, and a list of exceptions, a file each. An include that
neither allows, a folder that the table lacks, and what is allowed and nothing needs are errors."""

import pathlib
import re
import sys


def rules_of(page):
    """The table: folder -> folders it may include; the list: (file, included file)."""
    allowed = {}
    for folder, may in re.findall(r"^\| `([\w/]+)` \|([^|]*)\|$", section(page, "Who may include whom"), re.M):
        allowed[folder] = set(re.findall(r"`([\w/]+)`", may))
    exceptions = set(re.findall(r"^- `([\w./]+)` includes `([\w./]+)`$", page, re.M))
    return allowed, exceptions


def section(page, title):
    start = page.index("## " + title)
    end = page.find("\n## ", start)
    return page[start:end] if end >= 0 else page[start:]


def includes_of(headers):
    """(file, included file), both below include/freekv."""
    for path in sorted([*headers.rglob("*.hpp"), *headers.rglob("*.cuh")]):
        for included in re.findall(r"^#\s*include\s+[<\"]freekv/([\w./]+)[>\"]", path.read_text(), re.M):
            yield path.relative_to(headers).as_posix(), included


def folder_of(path):
    """A folder's `detail` is part of it."""
    return path.rpartition("/")[0].removesuffix("/detail")


def main(root):
    headers = root / "include" / "freekv"
    allowed, exceptions = rules_of((root / "docs" / "architecture.md").read_text())
    errors, needed, used, seen = [], set(), set(), set()
    if not allowed:
        errors.append("docs/architecture.md has no table of who may include whom")
    for path, included in includes_of(headers):
        if not (headers / included).is_file():
            errors.append(f"{path} includes {included}, which is not there")
        of, to = folder_of(path), folder_of(included)
        seen |= {of, to}
        if of in ("", to) or included == "config.hpp":
            continue
        if (path, included) in exceptions:
            needed.add((path, included))
        elif to in allowed.get(of, set()):
            used.add((of, to))
        else:
            may = ", ".join(sorted(allowed.get(of, []))) or "nothing"
            errors.append(f"{path} includes {included}, and {of} may include {may}")
    for folder in sorted(seen - set(allowed) - {""}):
        errors.append(f"docs/architecture.md does not say what {folder} may include")
    for folder in sorted(set(allowed) - seen):
        errors.append(f"docs/architecture.md speaks of {folder}, which no header is in")
    for of, to in sorted({(of, to) for of, may in allowed.items() for to in may} - used):
        errors.append(f"docs/architecture.md lets {of} include {to}, which it does not")
    for path, included in sorted(exceptions - needed):
        errors.append(f"docs/architecture.md excepts {path} including {included}, which it need not")
    print("\n".join(errors) or f"{len(allowed)} folders, {len(exceptions)} exceptions: as docs/architecture.md says")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
