"""``replayssm drift``: what rounding the state does to a model over long texts, against the conventional loop."""
