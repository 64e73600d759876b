"""The recipes of quantized compute by the names that ``train_lm.py --recipe`` takes."""

from __future__ import annotations

from opfuser import recipe

RECIPES: dict[str, recipe.Recipe] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "predicted": recipe.Float8PredictedScaling(),
    "block": recipe.Float8BlockScaling(),
}
