"""Holds the pages to what they name: `check_pages.py ROOT`.

Links and anchors resolve, files that are named exist and have the names that pages give them, sections of
docs/contract.md that comments cite are there, the README keeps its size and shows rows of the main job's table, and
CONTRIBUTING.md keeps its columns."""

import pathlib
import re
import sys

README = {"lines": 150, "columns": 110, "words": 1500, "first code at line": 45, "words of a sentence": 24}


def prose_of(page):
    """Without what stands in fences."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)


def anchor_of(heading):
    """As renderers of Markdown make it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(page):
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.M)}


def links(path, root):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path.read_text())):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name) if name else path
        if not to.exists():
            yield f"links to {target}, which is not there"
        elif anchor and anchor not in anchors_of(to.read_text()):
            yield f"links to {target}: no heading of {to.relative_to(root)} makes #{anchor}"


def named_files(path, root):
    """Files named in backticks: a path with a folder or an extension of the project's, from one of the places below."""
    places = [root, path.parent, root / "include" / "freekv", root / "docs"]
    for name in re.findall(r"`([\w./-]+)`", prose_of(path.read_text())):
        if not re.search(r"\.(hpp|cuh|cpp|cu|md|sh|py|txt|cmake|jsonl|png|safetensors|gz)$", name):
            continue
        if "/" in name and name.startswith("build/"):
            continue
        if "/" in name and not any((place / name).exists() for place in places):
            yield f"names {name}, which is not there"


def named_parts(path, root):
    """Of `file`: `name`, `name` each name stands in the file."""
    for file, names in re.findall(r"`([\w./]+\.\w+)`: ((?:`\w+`(?:, )?)+)", prose_of(path.read_text())):
        for place in (root, root / "include" / "freekv"):
            if (place / file).is_file():
                text = (place / file).read_text()
                for name in re.findall(r"\w+", names):
                    if not re.search(rf"\b{name}\b", text):
                        yield f"names {name} of {file}, which does not stand there"


def sentences(page):
    text = re.sub(r"^(\||#|    |!\[).*$", "\n", prose_of(page), flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n- ", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            yield sentence


def readme(root):
    page = (root / "README.md").read_text()
    lines = page.splitlines()
    code = next((i for i, line in enumerate(lines, 1) if line.startswith("```")), len(lines))
    measured = {"lines": len(lines), "columns": max(map(len, lines)), "words": len(page.split()),
                "first code at line": code,
                "words of a sentence": max(len(sentence.split()) for sentence in sentences(page))}
    for what, most in README.items():
        if measured[what] > most:
            yield f"{what}: {measured[what]}, at most {most}"
    for sentence in sentences(page):
        if len(sentence.split()) > README["words of a sentence"]:
            yield f"a long sentence: {sentence}"
    table = (root / "docs" / "main-job" / "table.txt").read_text()
    cells_of_all = (root / "docs" / "evaluation" / "table.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", page, re.M)
    if len(rows) != 4:
        yield f"its table has {len(rows)} rows of methods, not 4"
    for name, cells in rows:
        of_method = " ".join(re.findall(rf"^{name} .*$", table, re.M)).split()
        of_method += re.findall(r"[\d./]+", " ".join(re.findall(rf"^\| `{name}` \|(.*)$", cells_of_all, re.M)))
        for number in re.findall(r"[\d./]+", cells):
            if number not in of_method:
                yield f"{name}: {number} stands in no row of docs/main-job/table.txt or docs/evaluation/table.md"


def contributing(root):
    for number, line in enumerate((root / "CONTRIBUTING.md").read_text().splitlines(), 1):
        if len(line) > README["columns"]:
            yield f"line {number} has {len(line)} columns, at most {README['columns']}"


def citations(root):
    """Sections of the contract that comments cite, as `docs/contract.md, 5.1`."""
    contract = (root / "docs" / "contract.md").read_text()
    there = set(re.findall(r"^\*\*(\d+\.\d+) ", contract, re.M)) | set(re.findall(r"^## (\d+)\. ", contract, re.M))
    invariants = contract[contract.index("## 13. Invariants"):]
    there |= {"13." + n for n in re.findall(r"^(\d+)\. ", invariants, re.M)}
    for folder in ("include", "tests", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".hpp", ".cuh", ".cpp", ".cu", ".txt", ".py") or not path.is_file():
                continue
            for section in re.findall(r"contract\.md,? (\d+(?:\.\d+)?)", path.read_text(errors="replace")):
                if section not in there:
                    yield f"{path.relative_to(root)} cites section {section}, which docs/contract.md does not have"


def examples(root):
    found = [path for kind in ("*.cpp", "*.cu") for path in sorted((root / "examples").glob(kind))]
    for path in found:
        if (lines := len(path.read_text().splitlines())) >= 80:
            yield f"{path.relative_to(root)}: {lines} lines; examples have under 80"
    if len({path.stem for path in found}) != 5:
        yield f"examples/ has {len({path.stem for path in found})} programs, not five"


def versions(root):
    version = re.search(r"project\(freekv VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text())[1]
    for name, text in (("README.md", f"version {version}"), ("CHANGELOG.md", f"## {version}"),
                       ("CITATION.cff", f"\nversion: {version}\n")):
        if text not in (root / name).read_text():
            yield f"{name} does not say {text.strip()}, which CMakeLists.txt does"


def main(root):
    pages = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += sorted((root / "docs").glob("*.md"))
    errors = [f"README.md: {error}" for error in readme(root)]
    errors += [f"CONTRIBUTING.md: {error}" for error in contributing(root)]
    errors += list(citations(root)) + list(versions(root)) + list(examples(root))
    for path in pages:
        for check in (links, named_files, named_parts):
            errors += [f"{path.relative_to(root)} {error}" for error in check(path, root)]
    print("\n".join(errors) or f"{len(pages)} pages: links, files and sections are there")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
