"""Make a model smaller: a student that learns from it, its weights in 8 bits, what each costs. Used by station 8."""

import time
import warnings
from statistics import median

import torch
from implement import accuracy, fit, predict
from station import FOLDER
from torch.ao.quantization import get_default_qconfig_mapping  # torch 2.11 to 2.15 have it; its successor is torchao
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from train import Moved

import meshwise as mw


def distil(teacher, student, data, epochs):
    """On every device: train a student on the labels and on a teacher's probabilities, half and half."""
    torch.manual_seed(0)
    probabilities, labels = predict(mw.distribute(teacher), data)
    targets = (probabilities + torch.nn.functional.one_hot(labels, 10)) / 2
    fit(student, Moved(data.tensors[0], targets), epochs)
    return student.cpu().state_dict()


def in_8_bits(model, images):
    """A copy with weights and activations of 8 bits, their ranges seen on these images. It runs on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model.eval(), get_default_qconfig_mapping(torch.backends.quantized.engine), (images,))
        prepared(images)
        return convert_fx(prepared)


def compared(models, test, turns=20):
    """(name, accuracy, KiB of its file, milliseconds for 100 images) of each: medians, by turns, on one thread."""
    images = test.tensors[0][:100]
    torch.set_num_threads(1)
    seconds = {name: [] for name in models}
    for name, model in [*models.items()] * turns:
        begin = time.perf_counter()
        with torch.no_grad():
            model(images)
        seconds[name].append(time.perf_counter() - begin)
    for name, model in models.items():
        torch.save(model.state_dict(), file := FOLDER / f"{name}.pt")
        yield name, accuracy(*predict(model, test)), file.stat().st_size / 2**10, median(seconds[name]) * 1e3
