"""The demo: a corpus of stories and sums that never ends, the tasks that go with it, and a checker of stories."""

PLUGS = {
    "corpora": {"demo": "nanochat.demo.writer:DemoCorpus"},
    "tasks": {
        "stories": "nanochat.demo.stories:Stories",
        "new_stories": "nanochat.demo.stories:NewStories",
        "questions": "nanochat.demo.story_questions:StoryQuestions",
        "addition": "nanochat.demo.arithmetic:Addition",
        "arithmetic": "nanochat.demo.arithmetic:Arithmetic",
        "identity": "nanochat.demo.small_talk:Identity",
        "unknown": "nanochat.demo.small_talk:Unknown",
        "memory": "nanochat.demo.follow_ups:Memory",
        "repeat": "nanochat.demo.repeat:Repeat",
        "first_questions": "nanochat.demo.first_questions:FirstQuestions",
        "second_questions": "nanochat.demo.first_questions:FirstQuestions",
        "first_messages": "nanochat.demo.first_questions:FirstQuestions",
        "second_messages": "nanochat.demo.first_questions:FirstQuestions",
        "open_orders": "nanochat.demo.first_questions:FirstQuestions",
        "own_story": "nanochat.demo.first_questions:FirstQuestions",
        "sums": "nanochat.demo.first_questions:FirstQuestions",
    },
}
