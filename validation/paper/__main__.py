"""``python -m validation.paper``: writes validation/paper/results.md, and exits with 1 if a byte count differs."""

import sys
from pathlib import Path

from validation.paper.figure7 import figure7
from validation.paper.traffic import byte_counts


def main() -> int:
    counts = byte_counts()
    lines = ["# The paper's numbers", "", "## Byte counts", ""]
    lines += ["| what | paper | our schedule | equal |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {c.what} | {c.paper:g} {c.unit} | {c.ours:g} {c.unit} | {'yes' if c.equal else 'NO'} |" for c in counts
    ]
    lines += ["", "## Figure 7", "", *figure7()]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_name("results.md").write_text(text)
    print(text, end="")
    return 0 if all(count.equal for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
