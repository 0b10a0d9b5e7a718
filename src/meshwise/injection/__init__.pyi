from meshwise.injection import armed as armed
from meshwise.injection import faults as faults
