"""Pictures of where arrays live: what a user asks for (draw), and which device holds which block (blocks)."""
