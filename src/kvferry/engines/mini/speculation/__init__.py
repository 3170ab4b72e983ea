"""Speculative decoding: who drafts, and what becomes of drafts.

Read in this order: settings.py (what an operator says, and what follows from it), records.py (what the engine tells a
drafter), ngram.py and suffix.py (drafters from text alone), chain.py (the drafters that keep KV: MTP modules and
EAGLE heads), draft_model.py, verify.py (which drafts stand), acceptance.py (the count by position).
"""
