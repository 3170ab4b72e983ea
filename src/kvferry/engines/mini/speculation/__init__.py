"""Speculative decoding: the drafters, and the verification of their drafts.

Read in this order: speculation_settings.py in the folder above (what an operator sets, and what follows from it),
draft_records.py (what the engine and a drafter exchange), ngram.py and suffix.py (drafters that know only the text),
chain.py (drafters that keep KV: MTP modules and EAGLE heads), draft_model.py, rejection.py (which drafts are accepted),
acceptance.py (counts per position). drafting.py in the folder above is the engine's side of it.
"""
