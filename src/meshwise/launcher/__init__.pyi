from meshwise.launcher import joined as joined
from meshwise.launcher import placing as placing
from meshwise.launcher import start as start
