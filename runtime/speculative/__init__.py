"""Drafting and verification: pure logic over numpy logits."""
