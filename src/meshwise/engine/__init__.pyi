from meshwise.engine import seeds as seeds
