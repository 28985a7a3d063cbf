"""Configs that are written for RETURNN and import its package `returnn`.

`translate.py` rewrites a config before its keys are checked: `names.py` and `values.py` have RETURNN's names and values of keys,
`imports.py` watches what the config imports, and `steps.py` wraps its functions if it imports `returnn`.
"""
