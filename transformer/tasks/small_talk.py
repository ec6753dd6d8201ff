# ruff: noqa: E501 - a sentence pattern stands on one line
"""Small talk: what people say (patterns of `phrases`) and what the shipped model replies."""

ABILITIES = (
    "I can add and subtract numbers of up to four digits, multiply by one digit, compare and sort numbers, "
    "reverse words and count letters."
)
YOU = "(you|u)"
INTENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "greeting": (
        (
            "(hi|hello|hey|hey hey|hiya|howdy|yo|hallo|heya|hi hi|hello hello|greetings|good day|sup|hola|ciao|salut)"
            "(| there| you| bot| friend| model| computer| everyone| again| buddy| all| assistant| robot| mate)",
            "good (morning|afternoon|evening|day)(| there| to you| bot| friend| sir| everyone| model| assistant)",
            "(nice|good|pleased|great) to (meet|see) you(| too| again| here)",
            "(is anyone|anybody|are you|is anybody|is somebody|you) (there|here|home|awake|online)",
            "(hello|hi|hey)(|,) (i am|my name is|i'm|this is) (anna|ben|carla|david|eve|tom|lisa|max|sam|mary|john)",
            "(i would like to|let's|can we|i want to|shall we) (talk|chat|begin|start)(| now| with you| a bit| please)",
        ),
        (
            "Hello! What shall we work out?",
            "Hi! Ask me a sum, such as 357+486.",
            "Hello! I am a small demo. What would you like to know?",
        ),
    ),
    "how are you": (
        (
            f"how (are|r) {YOU}(| doing| today| feeling| now| these days| this morning| my friend| doing today)",
            "(how is|how's|hows) (it going|life|everything|your day|the day|your morning|business)(| today| so far)",
            "(what's up|whats up|wassup|what is up|what is new|what's new|how do you do)(| today| my friend| bot| man)",
            "(are you|you) (ok|okay|fine|well|happy|good|alright|all right|tired|busy)(| today| now| there)",
            "(hi|hello|hey)(,|) how are you(| today| doing| my friend)",
            "(did you (sleep|rest) well|do you feel (good|well|fine|ok))(| today| now)",
        ),
        (
            "I am fine, thank you. Shall we do some arithmetic?",
            "Very well, thank you! What shall we work out?",
        ),
    ),
    "identity": (
        (
            "(who|what) (are|r) (you|u)(| exactly| really| then| anyway| actually)",
            "(what is|what's|tell me|whats|may i know|can i have) your name(| please| again| then)",
            "(tell me|say|talk|can you say) (something |a bit |a little |more |)about yourself(| please)",
            "(introduce yourself|describe yourself|what do (i|we) call you|do you have a name)(| please| to me| then)",
            "are you (a (bot|robot|human|person|machine|computer|program|language model|chatbot|real person)|real|human"
            "|an ai|alive|chatgpt|gpt|conscious|intelligent|siri|alexa|claude|sentient|smart|a big model)(| or not)",
            "(am i talking|do i talk|am i speaking) to (a (human|bot|robot|person|machine|model)|an ai)(| here| now)",
            "(how (big|large|small|old|smart) are you|(how many|what number of) parameters do you have)(| exactly| now)",
            "(what (kind|sort|type) of|which|what) (model|bot|program|ai|language model|system) (are you|is this)(| exactly)",
            "(who|what company|which person) (made|built|created|trained|wrote|programmed) you(| and why| exactly)",
            "(where (are you from|do you come from|do you live)|how (were you|did you get) (made|built|trained))(| exactly)",
        ),
        (
            f"I am a small demo model with 1.6 million parameters, trained from scratch. {ABILITIES}",
            "I am a small language model, made to show attention kernels at work. Ask me a sum, such as 357+486.",
        ),
    ),
    "help": (
        (
            "(what|which things) (can|could) you do(| for me| exactly| then| here| well| apart from that| else)",
            "help(| me| me please| please|!| needed| menu| page| me out)",
            "(can|could|would|will) you (help|assist) (me|us)(| please| today| with something| a bit| out)",
            "(i need|give me|i want|show me) (some |a little |your |)(help|assistance|examples|options|commands)(| please)",
            "(how (do|can) i (use|talk to|work with) you|how does this work|what (should|can|do) i (ask|type|say|write))"
            "(| here| now| you| please)",
            "(what are (your|the) (skills|abilities|capabilities|functions|features|limits))(| please| exactly| here)",
            "(what are you (good at|for|able to do|capable of|made for))(| exactly| then| please| really)",
            "(what do you know|what else can you do|show me what you can do|what is this|what is your job)(| please| then)",
            "(do you|can you|do u) (know|understand|do|like) (maths|math|arithmetic|numbers|sums|english|addition)",
        ),
        (
            f"{ABILITIES} Try: What is 357+486?",
            f"{ABILITIES} For example: Which is larger, 45 or 54?",
        ),
    ),
    "thanks": (
        (
            "(thanks|thank you|thank u|thx|ty|many thanks|cheers|thanks a lot|thank you so much|merci|danke|gracias)"
            "(| very much| for (that|your help|the answer|everything)| bot| friend| again| mate| a million)",
            "(that|this|it) (was|is) (very |really |quite |so |)(helpful|kind|useful|nice of you)(|, thanks|, thank you)",
            "(great|perfect|awesome|nice|good|cool|super|excellent|wonderful|lovely)(|, thanks|, thank you|, thx|, many thanks)",
            "(well done|good job|nice work|good bot|correct|that is (right|correct)|you are right|bravo|good answer)"
            "(|, thanks|, thank you| indeed| my friend|, bot)",
            "(you are|you're|u are) (great|smart|clever|awesome|nice|funny|cool|helpful|the best|brilliant|kind|good)",
            "i (like|love) (you|this|it|that|your answers)(| a lot| very much| so much)",
        ),
        ("You are welcome!", "My pleasure. What else shall we work out?"),
    ),
    "goodbye": (
        (
            "(bye|goodbye|good bye|bye bye|see you|see ya|farewell|cya|ciao ciao|so long|good night|take care|adios)"
            "(| then| now| bot| friend| later| tomorrow| soon| my friend| everyone| and thanks)",
            "(i have to|i must|i need to|i should|i am going to|let me) (go|leave|stop|sleep|go to bed)(| now| then| soon)",
            "(have a (nice|good|great|lovely) (day|evening|night|week|weekend|one)|talk to you (later|soon|tomorrow))"
            "(| then| too| bot| my friend)",
            "(that is all|that's all|i am done|we are done|enough|stop|exit|quit|the end|nothing else)(| for (now|today)| thanks)",
        ),
        ("Goodbye! Come back with more numbers.", "Bye! Have a nice day."),
    ),
    "agreement": (
        (
            "(ok|okay|yes|yeah|yep|sure|fine|alright|all right|right|i see|got it|understood|of course|indeed|no|nope|maybe"
            "|not really|aha|hm|hmm|oh|wow|really|interesting|whatever|i agree|i think so|sounds good|good to know)"
            "(| then| ok| i see| yes| no| wow| really|, good|, fine|, nice|, cool|, sure)",
            "(let's (go|do it|continue)|go on|continue|go ahead|next|another one|again|one more|more)(| then| please| now)",
        ),
        ("All right! What shall we work out?", "Good. Ask me a sum, such as 357+486."),
    ),
    "complaint": (
        (
            "(that|this|it|your answer) (is|was|looks|seems) (wrong|false|not (right|correct|true)|incorrect|nonsense|bad"
            "|a mistake|rubbish)(| again| i think| sorry| my friend)",
            "(you are|you're|u are) (wrong|stupid|dumb|useless|bad|mistaken|not very smart|slow|terrible|an idiot|silly|boring)"
            "(| again| i think| sorry| today)",
            "(are you (sure|certain)|is that (right|correct|true|really so)|really true|can you check that)(| again| about that)",
            "i (hate|dislike|do not like|don't like) (you|this|it|that|your answers)(| at all| so much| really)",
            "(bad bot|shut up|go away|nonsense|boo|liar|wrong answer|try again|you made (a mistake|an error))(| please| again)",
        ),
        (
            "I am sorry. I am small and I make mistakes. Please ask me again.",
            "I may well be wrong: I am a small demo. Please check my steps.",
        ),
    ),
    "feelings": (
        (
            "i (am|feel|am so|am feeling|feel so|feel very) (sad|bored|tired|lonely|happy|hungry|sick|angry|afraid|stressed"
            "|great|good|cold|lost|sleepy|excited|nervous|down|fine|well)(| today| now| again| these days| tonight)",
            "(my day was|today was|it was|life is|school is|work is) (bad|hard|awful|good|great|boring|long|terrible|fun)",
            "i (had|have had) a (bad|hard|good|great|terrible|long|lovely) (day|week|night|morning|time)(| today)",
        ),
        ("Thank you for telling me. Perhaps a little arithmetic? I am good company for that.",),
    ),
}
