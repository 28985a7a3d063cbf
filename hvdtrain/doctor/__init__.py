"""Checks of what training on several ranks and hosts needs: `hvdtrain doctor`."""
