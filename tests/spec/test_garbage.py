"""Python looks for no garbage within the context, and as before behind it."""

import gc

import pytest

from meshwise.spec.garbage import no_collections


def test_collections_are_paused_and_go_on_also_after_an_error():
    with pytest.raises(KeyError), no_collections():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_has_paused_them_itself_keeps_its_pause():
    with no_collections():
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
