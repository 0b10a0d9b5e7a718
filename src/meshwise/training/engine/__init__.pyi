from meshwise.training.engine import seeds as seeds
