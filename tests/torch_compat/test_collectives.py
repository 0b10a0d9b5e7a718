"""The bytes of a tensor, as they are sent."""

from __future__ import annotations

import torch

from meshwise.torch_compat.collectives import as_bytes


def test_one_element_of_any_stride_is_sent_from_where_it_lies() -> None:
    whole = torch.arange(6.0)
    one = whole[1::3][:1]
    as_bytes(one).zero_()
    assert whole.tolist() == [0, 0, 2, 3, 4, 5]
    assert as_bytes(whole.reshape(2, 3).T).view(torch.float32).tolist() == [0, 3, 0, 4, 2, 5]
