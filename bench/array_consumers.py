"""Functions of SciPy and scikit-learn that take arrays of the standard, on arrays that are divided, beside NumPy's.

    SCIPY_ARRAY_API=1 python bench/array_consumers.py        pip install scipy scikit-learn array-api-compat

Nothing of the two is changed, and nothing of them is known to meshwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"
import numpy as np
import scipy
import sklearn
from keep import keep
from scipy import cluster, fft, integrate, signal, special, stats
from sklearn import config_context, decomposition, discriminant_analysis, linear_model, metrics, preprocessing

import meshwise as mw

PLACES = 3
_draw = np.random.default_rng(0)
TABLE, ONE, OTHER = _draw.normal(size=(50, 7)), _draw.random(50) + 0.1, _draw.random(50) + 0.1
LABELS, GUESSED = (_draw.random(50) > 0.5).astype(np.int64), (_draw.random(50) > 0.5).astype(np.int64)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "special.logsumexp": (lambda x: special.logsumexp(x, axis=0), (TABLE,)),
    "special.softmax": (lambda x: special.softmax(x, axis=1), (TABLE,)),
    "special.log_softmax": (lambda x: special.log_softmax(x, axis=1), (TABLE,)),
    "special.rel_entr": (special.rel_entr, (ONE, OTHER)),
    "special.xlogy": (special.xlogy, (ONE, OTHER)),
    "special.expit": (special.expit, (ONE,)),
    "stats.zscore": (stats.zscore, (TABLE,)),
    "stats.entropy": (stats.entropy, (ONE,)),
    "stats.skew": (stats.skew, (TABLE,)),
    "stats.kurtosis": (stats.kurtosis, (TABLE,)),
    "stats.gmean": (stats.gmean, (ONE,)),
    "stats.variation": (stats.variation, (TABLE,)),
    "stats.pearsonr": (lambda x, y: tuple(stats.pearsonr(x, y)), (ONE, OTHER)),
    "stats.ttest_1samp": (lambda x: tuple(stats.ttest_1samp(x, 0.0)), (TABLE,)),
    "fft.fft": (fft.fft, (ONE,)),
    "fft.rfft2": (fft.rfft2, (TABLE,)),
    "signal.fftconvolve": (signal.fftconvolve, (ONE, OTHER)),
    "integrate.trapezoid": (integrate.trapezoid, (ONE,)),
    "cluster.vq.whiten": (cluster.vq.whiten, (TABLE,)),
    "StandardScaler": (lambda x: preprocessing.StandardScaler().fit_transform(x), (TABLE,)),
    "MinMaxScaler": (lambda x: preprocessing.MinMaxScaler().fit_transform(x), (TABLE,)),
    "normalize": (preprocessing.normalize, (TABLE,)),
    "PCA": (lambda x: decomposition.PCA(3, svd_solver="full").fit(x).explained_variance_, (TABLE,)),
    "Ridge": (lambda x, y: linear_model.Ridge(solver="svd").fit(x, y).coef_, (TABLE, ONE)),
    "LinearDiscriminantAnalysis": (
        lambda x, y: discriminant_analysis.LinearDiscriminantAnalysis().fit(x, y).coef_,
        (TABLE, LABELS),
    ),
    "mean_squared_error": (metrics.mean_squared_error, (ONE, OTHER)),
    "r2_score": (metrics.r2_score, (ONE, OTHER)),
    "accuracy_score": (metrics.accuracy_score, (LABELS, GUESSED)),
    "euclidean_distances": (metrics.pairwise.euclidean_distances, (TABLE,)),
    "rbf_kernel": (metrics.pairwise.rbf_kernel, (TABLE,)),
    "cosine_similarity": (metrics.pairwise.cosine_similarity, (TABLE,)),
}


def as_numpy(value: Any) -> Any:
    """Results of either side."""
    if isinstance(value, tuple):
        return [as_numpy(each) for each in value]
    return value.numpy() if isinstance(value, mw.Array) else np.asarray(value)


def main() -> None:
    """Call each, compare, print, keep."""
    xp = mw.array_namespace(f"{PLACES}xcpu")
    found = {}
    for name, (call, given) in CALLS.items():
        with config_context(array_api_dispatch=True):
            try:
                wanted, got = call(*given), as_numpy(call(*(xp.asarray(each) for each in given)))
                right = np.allclose(as_numpy(wanted), got, rtol=1e-6, atol=1e-9)
                found[name] = "as NumPy" if right else "differs"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:200]
        print(f"{name:28} {found[name]}", flush=True)
    right = sum(said == "as NumPy" for said in found.values())
    print(f"{right} of {len(found)}")
    versions = {"scipy": scipy.__version__, "scikit-learn": sklearn.__version__}
    keep("array_consumers", {"places": PLACES, "versions": versions, "right": right, "calls": found})


if __name__ == "__main__":
    main()
