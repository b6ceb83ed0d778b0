"""Where keys and values live: slots and pages (pool.py), and which prefixes they hold (radix.py)."""
