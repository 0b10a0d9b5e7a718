from meshwise.parallel import shard as shard
from meshwise.parallel import shard_refusals as shard_refusals
