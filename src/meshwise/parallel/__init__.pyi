from meshwise.parallel import shard as shard
