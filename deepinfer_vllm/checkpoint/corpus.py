"""The text from which the small tokenizer learns its merges: English, JSON, code, a few other scripts."""

TEXT = """\
The model reads a question and writes an answer, one token after another. Every layer of the model attends to the last
tokens of a window and to some rows of the past that an index has chosen. Most of what it has read is kept in a
cache, so
that a second question about the same document does not need to read the document again. When the cache is full, the
oldest blocks are given back and computed again when somebody asks for them.

You are a helpful assistant. You have access to a set of tools to help answer the user's question. You can invoke tools
by writing a block like the following. String parameters should be specified as is. For all other types (numbers,
booleans, arrays, objects), pass the value in JSON format. You must strictly follow the schema of the tool, its name and
its parameters. If thinking mode is enabled, you must output your complete reasoning before any tool calls or the final
response. Otherwise, output directly. Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the
reasoning). Response Format: you must adhere to the following schema to reply. Available Tool Schemas:

{"name": "get_weather", "description": "Get the current weather in a given location", "parameters": {"type": "object",
"properties": {"location": {"type": "string", "description": "The city and the country, for example Paris, France"},
"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1,
"maximum": 14}},
"required": ["location"], "additionalProperties": false}}
{"id": 17, "title": "A list of numbers", "values": [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144], "ok": true, "next": null}
{"users": [{"name": "Ann", "age": 31, "tags": ["new", "active"]}, {"name": "Bob", "age": 64, "tags": []}], "total": 2}

<calls> <invoke name="get_weather"> <parameter name="location" string="true">Berlin, Germany</parameter> </invoke>
<tool_result>{"temperature": 18.5, "wind": "north west", "humidity": 0.62}</tool_result>

Hello! How are you today? I am fine, thank you. What is the capital of France? The capital of France is Paris. Please
write a short story about a fox and a dog. Once upon a time there was a quick brown fox that jumped over a lazy dog. The
dog did not mind; it was warm, the sun was shining, and there was nothing else to do. "Where are you going?" the dog
asked. "To the river," said the fox, "to see where the water goes." And so they went together, over the hill and through
the wood, until they came to the sea. Tell me more about this. Explain why the sky is blue, step by step. First, light
from the sun is made of many colours. Second, the air scatters blue light more than red light. Therefore the sky looks
blue to us, and the evening sun looks red. Can you summarize the text in three sentences? Yes, I can.

def fibonacci(count: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:count]

class Cache:
    def __init__(self, size: int) -> None:
        self.size = size
        self.items: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        if key not in self.items:
            return None
        return self.items[key]

for (int i = 0; i < 10; i++) { printf("%d\\n", i); }
SELECT name, count(*) FROM orders WHERE price > 100 GROUP BY name ORDER BY name;
http://localhost:8000/v1/chat/completions  https://example.com/index.html?page=2  user@example.com  /usr/local/bin

# Heading

1. The first item of the list.
2. The second item, with a **bold** word and some `code`.
- 3.14159, 2.71828, 1,000,000 and 50 %; 2024-05-17; 12:30; x = y + z; a != b; (see above); [1]; e.g. this one.

\tTabs and   several   spaces,   and
\r\nlines that end in another way.

THE QUICK BROWN FOX. The Quick Brown Fox. the quick brown fox. Café, naïve, über, señor, façade, déjà vu, Ångström.
你好，世界。 你好。 Привет, мир! 10 € → 12 € 🙂 🙂

What time is it now? When will you be there? Who wrote this book, and why? Which of them would you like? How much does
it cost? I would like to know what happened after that. They were not sure about it, but she said that it could be done
before the end of the day. He had been working for many years, and now he wanted to make something good with his own
hands. We should think about people, their work, their house and their children. If you want, I can also give you an
example of each. Let us first look at the problem: there are two trains, one leaves at nine and the other at ten. Then
we find out how long it takes, and which one comes first. This is because the second train is faster. So the answer is
seven hours. Of course, other answers may be right too; there is often more than one way. In general, large numbers of
small things are hard to count, while a small number of large things is easy. Some days were long, most were short, and
only a few have been like this one. Do not forget to write down where it was found, what was used, and whether it
worked.
No other information should be included in the output. Here is the list of all the words that you asked for: over,
under, into, from, between, through, against, without, always, never, here, there, next, last, same, different, general,
important, possible, national, public, world, country, state, city, water, night, week, month, year, money, story,
point.
"""
