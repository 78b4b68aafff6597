"""Adapters to the engines that people run; each imports its engine, `import replayssm` none of them."""
