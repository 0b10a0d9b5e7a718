"""Station 5, train: on all devices, images shifted at random; saved after each epoch and when stopped.

meshwise run --devices 2xcpu --out journey/runs examples/journey/train.py      after Ctrl-C, the same command resumes
"""

import json

import matplotlib.pyplot as plt
import torch
from implement import dataset, network, predict
from station import FOLDER, accuracy, fingerprint, needs, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


class Shifted(TensorDataset):
    """Images, each shifted by up to `by` pixels, at random whenever it is read, and labels."""

    def __init__(self, images, labels, by):
        super().__init__(images, labels)
        self.by = by

    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image.roll(torch.randint(-self.by, self.by + 1, (2,)).tolist(), (1, 2)), label


if __name__ == "__main__":
    width, epochs = map(json.loads(needs("design.json", "design").read_text()).get, ("width", "epochs"))
    train, test = (dataset(*torch.load(needs(f"clean/{part}.pt", "clean"))) for part in ("train", "test"))
    torch.manual_seed(0)
    loader = DataLoader(Shifted(*train.tensors, by=2), batch_size=128, shuffle=True)
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model, optimizer, loader = mw.distribute(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * len(loader))
    history = {"losses": [], "starts": []}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "extra": history}
    saved = mw.checkpoint(FOLDER / f"state-{width}-{epochs}-{fingerprint(train)}", **parts)  # restores them in place
    history["starts"].append(len(history["losses"]))
    for epoch in range(saved.epoch, epochs):  # saves by itself, after each epoch and at Ctrl-C
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            history["losses"].append(loss.item())
            mw.log(loss=loss, step=len(history["losses"]))
        print(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.4f}", flush=True)
    torch.save({"width": width, "weights": model.state_dict()}, FOLDER / "model.pt")
    figures = {"test accuracy": f"{accuracy(*predict(model, test)):.2%}"}
    figures["resumed after step"] = ", ".join(map(str, history["starts"][1:])) or "never stopped"
    figure, axis = plt.subplots(figsize=(6, 2))
    axis.semilogy(history["losses"], linewidth=0.8)
    axis.vlines(history["starts"][1:], *axis.get_ylim(), color="C1", linestyle=":")
    axis.set(xlabel="step; dotted: stopped by Ctrl-C and resumed", ylabel="loss")
    report("train", f"Width {width}, {epochs} epochs on {mw.world_size()} devices.", figures, figure)
