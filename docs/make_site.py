"""A hook of mkdocs: pages of the root come into the site, and so does what a page links to outside docs/.

README.md is the first page. Sources, results and folders of examples are shown as text, under source/.
"""

import re
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"\]\((\.\./)?([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make each page anew, with links that hold in the site."""
    texts = {name: (ROOT / path).read_text(encoding="utf-8") for path, name in PAGES.items()}
    texts |= {file.src_uri: file.content_string for file in files.documentation_pages()}
    outside: set[Path] = set()
    for name, text in texts.items():
        folder = ROOT if name in PAGES.values() else (ROOT / "docs" / name).parent
        up = "](" + "../" * name.count("/")
        made = partial(site_link, folder, outside)
        found = LINK.sub(lambda link, made=made, up=up: made(link).replace("](", up), text)
        if name in files.src_uris:
            files.remove(files.src_uris[name])
        files.append(File.generated(config, name, content=found))
    for path in outside:
        add_source(files, config, path)
    return files


def site_link(folder: Path, outside: set[Path], link: re.Match[str]) -> str:
    """The link from a page at the site's root; a path outside docs/ is noted."""
    path = (folder / (link[1] or "") / link[2]).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return f"]({path.relative_to(ROOT / 'docs')}{link[3] or ''})"
    place = path.relative_to(ROOT)
    if str(place) in PAGES:
        return f"]({PAGES[str(place)]}{link[3] or ''})"
    outside.add(path)
    return f"](source/{place}/index.md)" if path.is_dir() else f"](source/{place}.txt)"


def add_source(files: Files, config: MkDocsConfig, path: Path) -> None:
    """A file as text; a folder as a list of its files and folders, with all that is in them."""
    place = f"source/{path.relative_to(ROOT)}"
    if path.is_file():
        if f"{place}.txt" not in files.src_uris:
            files.append(File.generated(config, f"{place}.txt", abs_src_path=str(path)))
        return
    inside = sorted(each for each in path.iterdir() if each.name != "__pycache__")
    rows = [f"- [{each.name}]({each.name}{'/index.md' if each.is_dir() else '.txt'})" for each in inside]
    files.append(File.generated(config, f"{place}/index.md", content="\n".join([f"# {path.name}", "", *rows, ""])))
    for each in inside:
        add_source(files, config, each)
