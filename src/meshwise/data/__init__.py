"""Who reads which sample, and draws which random numbers: the order, loaders, keyed draws."""
