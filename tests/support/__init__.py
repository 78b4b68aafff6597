"""What the tests of the core share: random inputs, poison, and a model of a cache that is checked by the oracle."""
