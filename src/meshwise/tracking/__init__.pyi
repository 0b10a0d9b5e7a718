from meshwise.tracking import tracking as tracking
