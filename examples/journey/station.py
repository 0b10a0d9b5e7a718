"""What the stations share: their folder, what one needs of another, and what each reports to journey.html."""

import hashlib
import html
import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import meshwise as mw

FOLDER = Path("journey")  # in the folder where the commands are typed
DEVICES = "all" if torch.accelerator.is_available() else "2xcpu"

MARK = FOLDER / ".made-by-meshwise"

if FOLDER.exists() and any(FOLDER.iterdir()) and not MARK.exists():
    raise SystemExit(f"The folder {FOLDER} here is somebody else's. Move it, or change to another folder.")
FOLDER.mkdir(exist_ok=True)
MARK.touch()

plt.switch_backend("svg")
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8})
plt.rcParams.update({"axes.prop_cycle": plt.cycler(color=["#0072b2", "#d55e00", "#009e73", "#8c6bb1"])})


def needs(name, station):
    """The path of what an earlier station has written."""
    if not (FOLDER / name).exists():
        raise SystemExit(f"{FOLDER / name} is missing. Run first: python examples/journey/{station}.py")
    return FOLDER / name


def accuracy(probabilities, labels):
    return (probabilities.argmax(1) == labels).float().mean().item()


def fingerprint(data):
    """Some letters that tell data sets of tensors apart."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in data.tensors)).hexdigest()[:8]


def load(network, path):
    """A network of station 5, with its weights."""
    saved = torch.load(path, map_location="cpu")
    model = network(saved["width"])
    model.load_state_dict(saved["weights"])
    return model


def report(station, done="", figures=None, *pictures):
    """Add to a station's row: what was done, figures by name, pictures (figures of matplotlib, or HTML). On rank 0."""
    if not mw.is_main():
        return
    path = FOLDER / "rows" / f"{station}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = json.loads(path.read_text()) if path.exists() else {"done": "", "figures": {}, "pictures": []}
    row["done"] = done or row["done"]
    row["figures"].update(figures or {})
    row["pictures"] = [each if isinstance(each, str) else svg(each) for each in pictures] or row["pictures"]
    path.write_text(json.dumps(row))
    for name, value in (figures or {}).items():
        print(f"{name}: {value}", flush=True)


def svg(figure):
    """A figure of matplotlib as SVG that stands in a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :]


def show(images, titles, columns):
    """Images as a figure, each with its title."""
    rows = max(1, -(-len(titles) // columns))
    figure, axes = plt.subplots(rows, columns, figsize=(columns * 0.7, rows * 0.95), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, title in zip(axes.flat, images, titles):
        axis.imshow(image, cmap="gray_r")
        axis.set_title(title, fontsize=8)
    return figure


def lines_for_many(script):
    """The functions of a script that have lines for many devices, as HTML: these lines in place of those for one."""
    lines = []
    functions = [each for each in Path(script).read_text().split("\n\n\n") if "  # many" in each]
    for function in functions:
        for line in [*function.splitlines(), ""]:
            code, _, one = line.partition("  # many")
            indent = line[: len(line) - len(line.lstrip())]
            lines += [f"<del>{indent}{html.escape(one.removeprefix(': '))}</del>"] if one else []
            lines.append(html.escape(line) if code == line else f"<ins>{html.escape(code)}</ins>")
    return "<pre>" + "\n".join(lines) + "</pre>"
