from meshwise.launcher import joined as joined
from meshwise.launcher import own_folder as own_folder
from meshwise.launcher import start as start
