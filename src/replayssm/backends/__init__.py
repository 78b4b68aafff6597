"""Where the closed form runs: one module a backend."""
