"""An error inside a backward on the GPU that is not there is an error, not the end of the process.

Of torch_compat/fake_device.py; and of parallel/offload.py on it.
"""

import pytest
import torch

from meshwise.planner.memory import memory_curve
from meshwise.planner.trace import trace
from meshwise.planner.work import Copy
from meshwise.spec.plan import Plan
from meshwise.torch_compat.fake import FakeTensors
from meshwise.torch_compat.fake_device import NAME, fake_device
from meshwise.training.jobs.registry import find_job


def value_of_gradient(gradient):
    gradient.sum().item()


def own_error(gradient):
    raise ZeroDivisionError("of a hook")


@pytest.mark.parametrize(("hook", "says"), [(value_of_gradient, "_local_scalar_dense"), (own_error, "of a hook")])
def test_what_a_hook_raises_is_raised(hook, says):
    in_order = torch.autograd.set_multithreading_enabled(False)
    with fake_device("main"), in_order, FakeTensors(lambda func, args, kwargs, run: run(), stands_for_real=True):
        y = torch.randn(3, 4, device=NAME, requires_grad=True).mul(2).tanh()
        y.register_hook(hook)
        with pytest.raises((ZeroDivisionError, RuntimeError), match=says):
            y.sum().backward()
        y = torch.randn(3, 4, device=NAME, requires_grad=True)
        y.sum().backward()  # the next one is as ever
        assert y.grad.shape == (3, 4)


def test_offloaded_activations_leave_the_device():
    job = find_job("gpt")
    kept, left = (trace(job, plan)[0].step for plan in (Plan(), Plan(offload=("activations",))))
    copies = [launch for launch in left.launches if isinstance(launch.what, Copy)]
    assert {launch.what.to for launch in copies} == {"host", "device"}
    assert all(launch.stream != "main" for launch in copies)
    assert memory_curve(left, on_host=True).peak.bytes > 10 * memory_curve(kept, on_host=True).peak.bytes
    assert memory_curve(left).peak.split["activations"] < memory_curve(kept).peak.split["activations"] / 100
