"""List numeric functions of other files by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwise.arrays import (
    cumulative,
    fft,
    layout,
    lookup,
    nan_functions,
    norms,
    numpy_numbers,
    numpy_products,
    products,
    quantiles,
    sets,
    solving,
    sorting,
    spectra,
)
from meshwise.arrays.methods import install_binary

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **products.FUNCTIONS,
    **cumulative.FUNCTIONS,
    **sorting.FUNCTIONS,
    **sets.FUNCTIONS,
    **lookup.FUNCTIONS,
    **quantiles.FUNCTIONS,
    **nan_functions.FUNCTIONS,
    **numpy_numbers.FUNCTIONS,
    **numpy_products.FUNCTIONS,
}
EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "fft": fft.FUNCTIONS,
    "linalg": {
        "matrix_transpose": layout.matrix_transpose,
        **products.FUNCTIONS,
        **solving.FUNCTIONS,
        **spectra.FUNCTIONS,
        **norms.FUNCTIONS,
        **numpy_products.LINALG,
    },
}
"""Functions of arrays, in a namespace of their own."""
EXTENSION_MAKERS: dict[str, dict[str, Callable[..., Any]]] = {"fft": fft.MAKERS}
"""Functions of these namespaces whose first parameter is the space."""
install_binary("matmul", products.matmul)
