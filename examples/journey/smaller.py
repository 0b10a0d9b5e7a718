"""Train a model again, or a student of it; its weights in 8 bits; what each costs. Used by station 8."""

import time
import warnings
from statistics import median

import torch
from implement import fit, predict
from station import FOLDER, accuracy
from torch.ao.quantization import get_default_qconfig_mapping  # in torch 2.11 to 2.15; its successor is torchao
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn.functional import one_hot
from train import Shifted

import meshwise as mw


def trained(model, data, epochs, rate, shift, teacher=None):
    """To be called on every device. Train on labels, or half on a teacher's probabilities. Return the weights."""
    torch.manual_seed(0)
    images, targets = data.tensors
    if teacher is not None:
        probabilities, labels = predict(mw.distribute(teacher), data)
        targets = (probabilities + one_hot(labels, 10)) / 2
    fit(model, Shifted(images, targets, by=shift), epochs, rate)
    return model.cpu().state_dict()


def in_8_bits(model, images):
    """A copy with weights and activations of 8 bits, their ranges seen on these images. It runs on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model.eval(), get_default_qconfig_mapping(torch.backends.quantized.engine), (images,))
        prepared(images)
        return convert_fx(prepared)


@torch.no_grad()
def compared(models, test, turns=20):
    """(name, accuracy, KiB of its file, milliseconds for 100 images) of each: medians, by turns, on one thread."""
    torch.set_num_threads(1)
    seconds = {name: [] for name in models}
    for name, model in [*models.items()] * turns:
        begin = time.perf_counter()
        model(test.tensors[0][:100])
        seconds[name].append(time.perf_counter() - begin)
    for name, model in models.items():
        file = FOLDER / f"{name}.pt"
        torch.save(model.state_dict(), file)
        right = accuracy(model(test.tensors[0]), test.tensors[1])
        yield name, right, file.stat().st_size / 2**10, median(seconds[name]) * 1e3
