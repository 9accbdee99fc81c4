"""Add the pages and pictures beside `docs/` to the site, and point links to them.

MkDocs calls `on_files` before it reads pages, and `on_page_markdown` for each page.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "experiments/README.md": "experiments.md",
    "examples/walkthroughs/quickstart.py": "quickstart.md",
    "examples/walkthroughs/per_patient.py": "per-patient.md",
    "examples/walkthroughs/secure_aggregation.py": "secure-aggregation.md",
}
"""Pages of other folders, and their places in the site."""
PROSE = re.compile(r"^# ", re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^):#\s]+)(?P<anchor>#[^)\s]*)?\)")
"""A link to a file of the repository, or a picture."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures beside `docs/`."""
    for path, page in PAGES.items():
        if path.endswith(".py"):
            files.append(File.generated(config, page, content=walkthrough(ROOT / path)))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for picture in sorted(ROOT.glob("experiments/results/**/*.png")):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def walkthrough(script: Path) -> str:
    """Return a script as a page: its comments as prose, its code in blocks, and what it printed.

    Args:
        script: begins with a docstring whose first line is the title; its output is in a `.txt` file beside it.
    """
    _, about, code = script.read_text().split('"""', 2)
    title, text = about.split(".\n", 1)
    parts = [f"# {title}", text.strip()]
    for part in re.split(r"\n\n((?:# .*\n)+)\n", f"{code.rstrip()}\n"):
        parts.append(PROSE.sub("", part).strip() if part.startswith("# ") else f"```python\n{part.strip()}\n```")
    return "\n\n".join([*parts, f"It prints:\n\n```\n{script.with_suffix('.txt').read_text()}```", ""])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with each link pointing to its place in the site.

    What is in the repository alone, such as a module, keeps its text without a link.

    Raises:
        FileNotFoundError: a link leads to no file of the repository.
    """
    place: str = page.file.src_uri
    origin = next((path for path, there in PAGES.items() if there == place), f"docs/{place}")

    def pointed(link: re.Match[str]) -> str:
        target = normpath(PurePosixPath(origin).parent / link["path"])
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{origin} links to {link['path']}, which is not in the repository")
        there = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            return link["text"]
        return f"{link['image']}[{link['text']}]({relpath(there, PurePosixPath(place).parent)}{link['anchor'] or ''})"

    return LINK.sub(pointed, markdown)
