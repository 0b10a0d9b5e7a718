from meshwise.training.tracking import tracking as tracking
