"""The sessions of a gateway: `registry` keeps them; `conversations` and `journal` record what they sampled."""
