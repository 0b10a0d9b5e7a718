"""Accuracy, as `evaluate.load("accuracy")` finds it in a folder of that name, without a download."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The share of predictions that are right."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)}
