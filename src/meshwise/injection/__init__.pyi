from meshwise.injection import faults as faults
