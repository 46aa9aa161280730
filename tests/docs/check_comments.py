"""Holds the headers' doc comments to begin with what they document, not with a word that needs the line above:
`check_comments.py ROOT`."""

import pathlib
import re
import sys

LEANS = r"(?:Of|Those|That|What|Whose|Where|And|The same|As|How|Whether|When|After|By|In|For|On)\b"


def beginnings(header):
    """(line number, comment) of each block of lines that begin with `///`."""
    inside = False
    for number, line in enumerate(header.read_text().splitlines(), 1):
        comment = re.match(r"\s*///(?!<)\s*(.*)", line)
        if comment and not inside:
            yield number, comment[1]
        inside = comment is not None


def main(root):
    headers = [path for path in sorted((root / "include").rglob("*")) if path.suffix in (".hpp", ".cuh", ".h")]
    errors, comments = [], 0
    for header in headers:
        for number, comment in beginnings(header):
            comments += 1
            if re.match(LEANS, comment):
                errors.append(f"{header.relative_to(root)}:{number} begins with no noun: {comment}")
    print("\n".join(errors) or f"{comments} doc comments begin with what they document")
    return 1 if errors or not comments else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
