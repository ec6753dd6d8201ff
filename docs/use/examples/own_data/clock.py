"""Writes chats.jsonl and problems.jsonl: the time in words, and as a clock shows it."""

import json

ONES = [
    "one", "two", "three", "four", "five", "six",
    "seven", "eight", "nine", "ten", "eleven", "twelve",
]  # fmt: skip
TEENS = ["thirteen", "fourteen", "a quarter", "sixteen", "seventeen", "eighteen", "nineteen"]
TWENTIES = ["twenty", *(f"twenty-{one}" for one in ONES[:9])]
MINUTES = [*ONES, *TEENS, *TWENTIES, "half"]

times = {}
for hour, name in enumerate(ONES, start=1):
    times[f"{name} o'clock"] = f"{hour}:00"
    for minutes, words in enumerate(MINUTES, start=1):
        times[f"{words} past {name}"] = f"{hour}:{minutes:02}"
        if minutes < 30:
            times[f"{words} to {name}"] = f"{hour - 1 or 12}:{60 - minutes}"

with open("chats.jsonl", "w") as chats, open("problems.jsonl", "w") as problems:
    for words, clock in times.items():
        user = {"role": "user", "content": f"What does a clock show at {words}?"}
        assistant = {"role": "assistant", "content": clock}
        chats.write(json.dumps({"messages": [user, assistant]}) + "\n")
        problems.write(json.dumps({"prompt": user["content"], "answer": clock}) + "\n")
