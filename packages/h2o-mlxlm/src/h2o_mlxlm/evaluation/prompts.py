"""Twenty short messages of different kinds: what ``eval generation`` lets a model go on from.

All have the same length in SmolLM2's tokens, so that they run as rows of one batch.
"""

PROMPTS = (
    "Explain photosynthesis, step by step, and where each step occurs in the cell.",
    "Explain how a bill becomes a law in the United States, stage by stage.",
    "Write a long story about a lighthouse keeper who finds a map in a bottle.",
    "Write a Python class for a bank account, with tests, and explain it.",
    "Describe the water cycle to a small child, and then again to an engineer.",
    "List twenty animals, and say where each of them lives and what it eats.",
    "Write a letter to a friend about a long week of hiking in the mountains.",
    "Compare trains, ships and planes as ways to carry goods, point by point.",
    "Tell me about the history of printing, from the first wood blocks to lasers.",
    "Write a dialogue between a teacher and a young student about odd and prime numbers.",
    "Give me a recipe for vegetable soup, and explain the reason for each step.",
    "Write a long poem about the four seasons in a small town by the sea.",
    "Explain how a modern computer runs a program, from source code to the screen.",
    "What are the main causes of inflation, and what can a whole country do?",
    "Plan a ten day trip through Italy, with something to see on each day.",
    "Describe the planets of the solar system one by one in order from the sun.",
    "Write the rules of a new board game for two players, and an example.",
    "Explain the difference between a virus and a bacterium, and give me some examples.",
    "Write a speech for the grand opening of a new library in a small town.",
    "How does a bicycle stay upright? Discuss all the forces that are at work.",
)
