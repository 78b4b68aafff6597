"""What ``replayssm bench`` and ``replayssm tune`` measure.

One layer's decode, in reading order: ``cases`` (what is measured), ``timing`` (how), ``replay`` and ``conventional``
(the two sides), ``accuracy``, ``kernel`` (one figure), ``rows`` (JSON lines with their origin), ``run`` (many figures),
``plots``; ``tiles`` and ``compile`` for sweeps.
"""
