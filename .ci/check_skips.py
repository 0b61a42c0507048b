"""Fail when a test was skipped for a reason that is not excused: a skipped test proves nothing."""

import sys
import xml.etree.ElementTree as ElementTree

EXCUSED = ("needs a CUDA device", "published profiles are not here")


def main(path: str) -> int:
    missed = [
        f"{case.get('classname')}::{case.get('name')}: {skipped.get('message')}"
        for case in ElementTree.parse(path).iter("testcase")
        for skipped in case.iter("skipped")
        if skipped.get("type") != "pytest.xfail" and not any(reason in skipped.get("message", "") for reason in EXCUSED)
    ]
    for line in missed:
        print(f"skipped without an excuse: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
