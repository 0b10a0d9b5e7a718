from meshwise.parallel import compiled as compiled
from meshwise.parallel import precision as precision
from meshwise.parallel import shard as shard
from meshwise.parallel import shard_refusals as shard_refusals
