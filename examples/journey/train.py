"""Station 5, train: on all devices, images moved at random, a schedule, saved; stopped at any time, it goes on.

meshwise run --devices 2xcpu examples/journey/train.py [EPOCHS]      again after Ctrl-C: from where it stopped
"""

import json
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from implement import accuracy, dataset, network, predict
from station import FOLDER, needs, tell
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


class Moved(TensorDataset):
    """Images, each moved by up to `by` pixels, anew whenever it is read."""

    by = 2

    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image.roll(torch.randint(-self.by, self.by + 1, (2,)).tolist(), (1, 2)), label


if __name__ == "__main__":
    design = json.loads(needs("design.json", "design").read_text())
    epochs = int(sys.argv[1]) if sys.argv[1:] else design["epochs"]
    train, test = (dataset(*torch.load(needs(f"clean/{part}.pt", "clean"))) for part in ("train", "test"))
    torch.manual_seed(0)
    loader = DataLoader(Moved(*train.tensors), batch_size=128, shuffle=True)
    model = network(design["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    saved = mw.checkpoint(FOLDER / f"state of {epochs} epochs", **parts, extra=(kept := {"losses": [], "began": []}))
    kept["began"].append(len(kept["losses"]))
    for epoch in range(saved.epoch, epochs):
        for images, labels in loader:
            loss = mw.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            kept["losses"].append(loss.item())
            mw.log(loss=loss, step=len(kept["losses"]))
        mw.print(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.4f}", flush=True)
    figures = {"accuracy": f"{accuracy(*predict(model, test)):.2%}"}
    mw.save(model.state_dict(), FOLDER / "model.pt")

    figure, axis = plt.subplots(figsize=(7, 2))
    axis.plot(kept["losses"], linewidth=0.8)
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    for step in kept["began"][1:]:
        axis.axvline(step, color="C1", linestyle=":")
    figures["resumed after step"] = ", ".join(map(str, kept["began"][1:])) or "never stopped"
    tell("train", f"Width {design['width']}, {epochs} epochs on {mw.world_size()} devices.", figures, figure)
