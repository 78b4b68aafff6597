"""The command line: ``replayssm generate | check | explain``."""
